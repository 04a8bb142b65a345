"""torchrun on rdzv: `torchrun --rdzv-backend=rdzv ...` with unchanged training code.

The only place where torch is imported. `plugin` is what torch finds and loads; `conf` reads what the user gave; `handler` is
what torch's agent calls, with `agent_store`, `signals` and `events` as its parts; `dist_store` is a
`torch.distributed.Store` for programs that want one. `rendezvous` has the names of torch's rendezvous package, and `endpoints`
the endpoints that need torch.
"""
