"""A Hub or local image data set becomes checked, model-ready examples.

Receives the name of a data set and the `ImageFormat` that a model wants. Returns the rows of each
split, their labels and privacy units, and the tensors of single examples and batches.

    sources   what a name means: the Hub, a folder, a file
    columns   finding and reading a column
    tables    CSV, JSON lines, Parquet and tars, read into memory
    folders   what each file of a folder is, and of which split
    repositories   data sets on the Hub
    labels    one class, or several labels, per row
    units     whose rows they are
    dicom     DICOM files as images
    images    images as tensors
    loading   all of the above, checked
    weights   of the classes in the loss
    examples  rows as tensors

Guarantees:
    * Every row of a returned split was decoded once and has a legal label, so the number of rows
      is fixed before any sampling rate is computed from it. No row is ever replaced by another.
    * Only pixels and labels reach a batch. No id of a patient is in a note or a refusal.

`ImageSplits.notes` counts rows of private data. It is for the local console, not for a model card.
"""

from hf_dpmuon.data.examples import ImageExamples, collate
from hf_dpmuon.data.identity import row_keys, storage_keys
from hf_dpmuon.data.images import ImageFormat, build_transforms
from hf_dpmuon.data.loading import ImageSplits, load_image_dataset
from hf_dpmuon.data.units import RepeatedUnit, unit_name
from hf_dpmuon.data.weights import class_weights

__all__ = [
    "ImageFormat",
    "ImageSplits",
    "RepeatedUnit",
    "load_image_dataset",
    "class_weights",
    "unit_name",
    "build_transforms",
    "ImageExamples",
    "collate",
    "row_keys",
    "storage_keys",
]
