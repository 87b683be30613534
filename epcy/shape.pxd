"""Nothing to cimport: a Buffer asks for its shape once, from Python."""
