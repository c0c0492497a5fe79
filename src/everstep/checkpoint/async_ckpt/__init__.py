"""Saving in the background under NVRx's names: `core`, `torch_ckpt`, `filesystem_async`, `state_dict_saver`."""
