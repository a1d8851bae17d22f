"""Commands of the command line: ``build-horovod`` and ``doctor``."""
