"""The version of epcy, written here and nowhere else."""

__version__ = "0.1.0"
