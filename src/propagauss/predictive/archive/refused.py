"""Why a file is refused."""


class Refused(ValueError):
    """Something in the file that `export` never writes; the path and the remedy are added by whoever reads it."""
