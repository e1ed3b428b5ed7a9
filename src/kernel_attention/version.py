"""The version, read by the build and by run folders."""

__version__ = "0.1.0"
