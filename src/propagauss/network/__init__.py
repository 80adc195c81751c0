"""What `streamline` returns: the module that maps inputs to Gaussians, and its plan."""
