"""Print the symbols that a graph binds to, for hardware that this machine does not have."""

import kvgraph


def main() -> None:
    params = kvgraph.KVCacheParams(
        dtype="bfloat16",
        n_kv_heads=8,
        head_dim=128,
        num_layers=32,
        devices=tuple(kvgraph.virtual_devices("cuda:sm_90", count=4)),
        data_parallel_degree=2,
    )
    manager = kvgraph.NullKVCacheManager(
        params,
        max_batch_size=64,
        max_seq_len=8192,
        num_layers=params.num_layers,
        devices=params.devices,
        session=None,
        available_cache_memory=0,
    )
    for record in manager.get_symbolic_inputs():
        for symbol in record:
            print(f"{symbol.name:14} {symbol.dtype:9} {symbol.device!s:7} {list(symbol.shape)}")
    plan = kvgraph.plan_memory(params, available=60 << 30, max_batch_size=64, max_seq_len=8192)
    print(
        f"60 GiB: {plan.num_pages} pages of {plan.bytes_per_page} bytes in all devices of a replica"
    )


if __name__ == "__main__":
    main()
