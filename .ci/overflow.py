"""Has the extension read past the end of an allocation; run it under ASan, which must stop it."""

import ctypes
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from fastsync._build import extension

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
floats = ctypes.cast(libc.malloc(64), ctypes.POINTER(ctypes.c_float))
beyond = torch.from_numpy(np.ctypeslib.as_array(floats, (1000,)))
extension.load().pack([beyond], [beyond], [0], torch.zeros(1008), 1.0)
print("nothing noticed the overflow")
