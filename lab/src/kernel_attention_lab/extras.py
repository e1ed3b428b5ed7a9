"""The extras of the laboratory: which one installs a package that is missing."""

from __future__ import annotations

_NEEDED = {
    "jinja2", "lightning_fabric", "matplotlib", "numpy", "PIL", "pydantic", "rich", "safetensors", "scipy",
    "sklearn", "tensorboardX", "torch", "yaml",
}  # fmt: skip
_EXTRAS = {
    "aeon": "timeseries", "cv2": "robustness", "datasets": "language", "eagerpy": "robustness",
    "foolbox": "robustness", "gymnasium": "control", "h5py": "control", "imagecorruptions": "robustness",
    "kornia": "images", "minari": "control", "mujoco": "control", "onnx": "export", "onnxruntime": "export",
    "onnxscript": "export", "optuna": "sweep", "pyautoattack": "robustness",
    "skimage": "robustness", "tokenizers": "language", "transformers": "language",
}  # fmt: skip


def install_hint(error: ModuleNotFoundError, what: str) -> str | None:
    """One line that names a missing package and what installs it.

    Args:
        error: the error of the import.
        what: what the user asked for.

    Returns:
        The line; None for any other package, where the error is a defect of this project.
    """
    package = (error.name or "").partition(".")[0]
    if package in _NEEDED:
        return f"{what} needs {package}, which is not installed: pip install kernel-attention-lab"
    if package in _EXTRAS:
        extra = _EXTRAS[package]
        return f"{what} needs {package}, which is not installed: pip install 'kernel-attention-lab[{extra}]'"
    return None
