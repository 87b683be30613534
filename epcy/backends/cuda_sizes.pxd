"""Nothing to cimport: sizes are asked for from Python."""
