import numpy as np
import numpy.typing as npt

def mamba_into(
    state: npt.NDArray[np.float32],
    inputs: npt.NDArray[np.float32],
    dt: npt.NDArray[np.float32],
    b: npt.NDArray[np.float32],
    c: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    decay: npt.NDArray[np.float32],
    skip: npt.NDArray[np.float32],
    /,
) -> None: ...
def delta_into(
    state: npt.NDArray[np.float32],
    query: npt.NDArray[np.float32],
    key: npt.NDArray[np.float32],
    value: npt.NDArray[np.float32],
    decay: npt.NDArray[np.float32],
    beta: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    /,
) -> None: ...
def convolve_into(
    state: npt.NDArray[np.float32],
    inputs: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32],
    bias: npt.NDArray[np.float32] = ...,
    /,
) -> None: ...
