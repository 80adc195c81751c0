"""The files behind the page to play with (`docs/play/`)."""
