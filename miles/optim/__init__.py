"""State of the trainer on node-local disk: main parameters and Adam moments, streamed through memory bucket by bucket, and what waits there while engines have
the GPUs. Must not know the loss.

It is working memory, not a checkpoint: a trainer that starts makes it anew from the model or from a checkpoint.
"""

from miles.optim.adam import StreamedAdam
from miles.optim.folder import check_folder, claim, folder_of, left_by, release
from miles.optim.layout import BucketLayout, Piece
from miles.optim.paused import PausedFile
from miles.optim.saved import SavedFile, SavedState, SavedTensor, file_names, is_saved
from miles.optim.store import BucketStore, Manifest, Snapshot

__all__ = ["BucketLayout", "BucketStore", "Manifest", "PausedFile", "Piece", "SavedFile", "SavedState", "SavedTensor", "Snapshot", "StreamedAdam", "check_folder", "claim", "file_names",
           "folder_of", "is_saved", "left_by", "release"]
