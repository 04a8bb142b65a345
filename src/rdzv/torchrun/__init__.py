"""torchrun on rdzv: `torchrun --rdzv-backend=rdzv ...` with unchanged training code.

torch finds and loads `plugin`; `conf` reads torchrun's options; `handler` is the object
that torch's agent calls, with `agent_store`, `signals` and `events` as its parts. `dist_store` is a
`torch.distributed.Store` over a round's store. `rendezvous` has the names of torch's rendezvous package.
"""
