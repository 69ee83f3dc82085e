"""Task Vector Bases for mergekit."""

__version__ = "0.1.0"
