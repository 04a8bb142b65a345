"""The version, in the one place that the build, the wire and the command line take it from."""

__version__ = "0.2.0.dev0"
