"""Triton's interpreter, mended for a newer numpy."""

import torch

if not torch.cuda.is_available():
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index(tensor: type, scope: object) -> None:
        """numpy >= 2.4 makes no int of an array of one element; Triton 3.6 asks for it."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index
