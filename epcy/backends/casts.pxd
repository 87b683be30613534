"""Nothing to cimport: the casts are called from Python."""
