"""Read a teacher store with zarr alone: python read_store.py runs/x.zarr"""

import sys

import numpy as np
import zarr

block = zarr.open_group(f"{sys.argv[1]}/blocks/000000", mode="r")
first, last = block["document_offsets"][:2]
if "hidden_states" in block:  # bf16 bits
    features = (block["hidden_states"][first:last].astype(np.uint32) << 16).view(np.float32)
else:  # int8: code x scale of the token x scale of the channel
    scale = block["hidden_states_scale"][first:last][:, :, None]
    features = block["hidden_states_q"][first:last] * scale * block["hidden_states_channel"][:]
print("document", block["document_index"][0], "tokens", block["input_ids"][first:last])
print("features", features.shape, "[tokens, taps, hidden], mean size", np.abs(features).mean(axis=(0, 2)))
