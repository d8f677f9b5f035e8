"""The small MLflow model that a registered version consists of: `policy_pyfunc.py` and where its checkpoint is."""

from __future__ import annotations

import atexit
import importlib.metadata
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tasks.tracking.tracker import Tracker

_SCRIPT = Path(__file__).with_name("policy_pyfunc.py")


def upload_pointer(tracker: Tracker, checkpoint: Path, digest: str, max_completion_tokens: int) -> str:
    """Put a pointer to a checkpoint among the artifacts of the MLflow run and return its `runs:/` address.

    The place is a function of the digest, so an upload that broke off is completed by the next one.
    """
    from mlflow.models import Model

    place = f"policies/{digest[:16]}"
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "policy"
        shutil.copytree(_template(), folder)
        model = Model.load(str(folder))
        model.flavors["python_function"]["config"] = {
            "checkpoint": str(checkpoint),
            "sha256": digest,
            "max_completion_tokens": max_completion_tokens,
        }
        model.save(str(folder / "MLmodel"))
        tracker.client.log_artifacts(tracker.run_id, str(folder), artifact_path=place)
    return f"runs:/{tracker.run_id}/{place}"


@cache
def _template() -> Path:
    """A pointer to nothing: MLflow needs about a second to write one, and only its config differs between versions."""
    import mlflow.pyfunc

    parent = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = Path(parent) / "policy"
    packages = ("rlstages", "mlflow", "torch", "transformers")
    mlflow.pyfunc.save_model(
        str(folder),
        python_model=str(_SCRIPT),
        model_config={"checkpoint": "", "sha256": "", "max_completion_tokens": 0},
        pip_requirements=[f"{name}=={importlib.metadata.version(name)}" for name in packages],
    )
    return folder
