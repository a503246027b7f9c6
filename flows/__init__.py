"""The order of things: setup, epochs, evaluation, and the command line. Importing this package is cheap."""
