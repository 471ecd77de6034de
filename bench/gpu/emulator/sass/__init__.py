"""Machine code, as ``nvdisasm`` shows it."""
