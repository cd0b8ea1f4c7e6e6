"""Commands to configure and start runs: init, train, up, create, eval, export."""
