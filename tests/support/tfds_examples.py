"""A small data set of TensorFlow Datasets, for the fixtures `tfds`, `dataset` and `data_dir`."""

import functools
import warnings

import numpy as np


def example_texts(first: int, last: int) -> list[str]:
    return [f"document number {i}, é and more" for i in range(first, last)]


SPLITS_OF_EXAMPLES = {"train": example_texts(0, 1500), "test": example_texts(1500, 1510)}


@functools.cache
def import_tfds():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its dependencies' deprecations are not ours
        import tensorflow_datasets
    return tensorflow_datasets


@functools.cache
def examples_class():
    """A builder; once a process, since tfds takes a name only once."""
    tfds = import_tfds()

    class Examples(tfds.core.GeneratorBasedBuilder):
        name = "fp8jax_examples"
        __module__ = "examples"  # tfds looks beside its file for metadata, if there is a file
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "text": tfds.features.Text(),
                "title": np.str_,
                "n": np.int64,
                "names": tfds.features.Sequence(tfds.features.Text()),
                "raw": np.object_,
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(t) for split, t in SPLITS_OF_EXAMPLES.items()}

        def _generate_examples(self, texts):
            for i, text in enumerate(texts):
                yield (
                    i,
                    {
                        "text": text,
                        "title": f"title {i}",
                        "n": i,
                        "names": [],
                        "raw": b"\xff" if i == 3 else b"raw text",
                    },
                )

    return Examples
