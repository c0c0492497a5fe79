"""Names that NVRx keeps under this path, handed on from where they live."""
