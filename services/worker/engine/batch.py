"""What one forward pass computes. T tokens, B rows (decode rows first), P prefill rows, S slots."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # [T] int32: one a decode row, then the prefill chunks
    positions: Tensor  # [T] int32
    locations: Tensor  # [T] int64: where each token's keys and values go, page * page_size + offset
    last_tokens: Tensor | None  # [B] int64: index of each row's last token; None: every row has one token
    slots: Tensor  # [B] int32
    lengths: Tensor  # [B] int32: KV tokens to attend to, this step's included; 0 for a done row
    query_starts: Tensor  # [P + 1] int32: where each prefill chunk begins among the prefill tokens
    page_table: Tensor  # [S, pages per slot] int32
    decode_rows: int
    max_query: int  # tokens of the longest prefill chunk

    @property
    def rows(self) -> int:
        return len(self.slots)

    @cached_property
    def row_starts(self) -> Tensor:
        """`[B + 1]` int32: where each row begins among the tokens, whose one token a decode row's chunk is."""
        decodes = torch.arange(self.decode_rows, dtype=torch.int32, device=self.query_starts.device)
        return torch.cat((decodes, self.query_starts + self.decode_rows))
