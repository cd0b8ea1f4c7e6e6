"""Commands that configure and start: init, train, up, create, eval, study."""
