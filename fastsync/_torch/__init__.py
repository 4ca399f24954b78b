"""Every private name of torch that fastsync leans on, and nothing else.

The supported versions of torch differ here or not at all. CI runs this package against the oldest
and the newest of them. What its modules list in `__all__` is imported from the package.
"""

from fastsync._torch.callers import *
from fastsync._torch.composable import *
from fastsync._torch.dtensor_handlers import *
from fastsync._torch.dtensors import *
from fastsync._torch.grad_scaler import *
from fastsync._torch.graphs import *
from fastsync._torch.groups import *
from fastsync._torch.optimizers import *
from fastsync._torch.parallel import *
from fastsync._torch.tensors import *
