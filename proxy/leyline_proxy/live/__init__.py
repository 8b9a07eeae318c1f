"""The live page: current events for its viewers, and the page itself."""
