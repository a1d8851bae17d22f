"""What the command line does: ``build-horovod`` and ``doctor``."""
