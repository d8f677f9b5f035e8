"""A registered policy as an MLflow model: a pointer to a checkpoint folder and its digest, no weights of its own.

MLflow runs a copy of this file when it loads the model, so it imports nothing from its own package but `rl_core`.
"""

import hashlib
from pathlib import Path
from typing import Any

from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from rl_core.errors import CorruptOutputError, ModelError
from rl_core.manifest import MANIFEST_NAME, Manifest, content_digest


class PolicyModel(PythonModel):
    """Answers prompts greedily. `model_config`: `checkpoint` (folder), `sha256`, `max_completion_tokens`."""

    def load_context(self, context: PythonModelContext) -> None:
        import torch

        from rl_core.models import choose_dtype, load_policy

        folder = Path(context.model_config["checkpoint"])
        verify(folder, context.model_config["sha256"])
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._policy = load_policy(folder, device, choose_dtype("auto", device)[0])
        self._max_completion_tokens = int(context.model_config["max_completion_tokens"])

    def predict(
        self, context: PythonModelContext, model_input: list[str], params: dict[str, Any] | None = None
    ) -> list[str]:
        """One answer per prompt. A prompt is the text of a user turn."""
        from rl_core.engines.base import SampleRequest
        from rl_core.engines.prompting import completion_budget, decode_completion, fit_prompt
        from rl_core.engines.sampler_transformers import TransformersSampler

        policy = self._policy
        tokenizer: Any = policy.tokenizer
        requests = []
        for index, text in enumerate(model_input):
            fitted = fit_prompt(
                tokenizer,
                [{"role": "user", "content": text}],
                limit=policy.context_tokens - 1,
                overlong="fail",
                where=f"prompt {index}",
            )
            assert fitted is not None  # with `fail` a prompt that does not fit raises
            budget = completion_budget(len(fitted[1]), self._max_completion_tokens, policy.context_tokens)
            requests.append(SampleRequest(fitted[1], [0], budget))
        answers = TransformersSampler(policy, 64).sample(requests, 0.0)
        return [decode_completion(tokenizer, answer[0].token_ids) for answer in answers]


def verify(folder: Path, digest: str) -> None:
    """Raise unless the model files of a checkpoint are those its digest stands for."""
    if not (folder / MANIFEST_NAME).is_file():
        raise ModelError(
            f"the checkpoint of this model version is not at {folder}",
            expected="a checkpoint folder with its manifest",
            todo="load the model where the run folder is, or pass model_config={'checkpoint': its new place}",
        )
    manifest = Manifest.model_validate_json((folder / MANIFEST_NAME).read_text())
    if content_digest(manifest.files) != digest:
        raise CorruptOutputError(f"{folder} holds another checkpoint", expected=digest, got=manifest.digest)
    for entry in manifest.files:
        if entry.name.startswith("trainer/") or entry.name.endswith(".parquet"):
            continue  # not loaded here
        path = folder / entry.name
        if not path.is_file():
            raise CorruptOutputError(f"{path} is missing")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != entry.sha256:
            raise CorruptOutputError(f"{path} does not match its digest", expected=entry.sha256, got=found)


set_model(PolicyModel())
