"""Models, engines and routers that take the place of a user's own."""
