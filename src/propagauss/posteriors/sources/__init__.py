"""Posteriors that other libraries made: laplace-torch, IVON, SWAG."""
