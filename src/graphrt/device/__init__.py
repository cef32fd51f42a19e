"""Devices: the protocol, and the one function that picks an implementation."""
