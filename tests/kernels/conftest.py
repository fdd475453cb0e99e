from typing import Any

from tests.kernels.support import INTERPRETED

if INTERPRETED:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes `int()` of a scalar that it keeps as an array of one element; NumPy 2.4 no longer allows that."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
