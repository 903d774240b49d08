"""Compile a module of your own: its attention calls kvgraph.ops, all else is plain torch."""

import sys
from pathlib import Path

from torch import nn

import kvgraph
from kvgraph import ops

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 64, 2, 4, 2, 16


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x, row_offsets, pool, lengths, table, max_lengths):
        heads = self.qkv(self.norm(x)).view(x.shape[0], -1, HEAD_DIM)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        ops.store_kv(pool, k, v, row_offsets, lengths, table, layer=self.index)
        out = ops.paged_attention(
            q,
            pool,
            row_offsets,
            lengths,
            table,
            max_lengths,
            layer=self.index,
            scale=HEAD_DIM**-0.5,
        )
        return x + self.out(out.reshape(x.shape[0], -1))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))

    def forward(self, tokens, row_offsets, logits_indices, *cache):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, row_offsets, *cache)
        return x[logits_indices.long()] @ self.embed.weight.T


def main(out: Path) -> None:
    params = kvgraph.KVCacheParams("float32", KV_HEADS, HEAD_DIM, LAYERS, page_size=16)
    kvgraph.compile(Decoder(), out, params=params, vocab_size=VOCAB, max_seq_len=512, force=True)
    print(kvgraph.Engine(out).generate([[1, 2, 3], [4, 5, 6, 7]])[0].token_ids)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/own-module.kvg"))
