"""The fixture of the devices."""

from .device import device

__all__ = ["device"]
