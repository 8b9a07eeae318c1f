"""SGLang's scheduler without a model, for measuring the time of its own steps."""
