"""Who gets which samples: the ledger of a pass, and dealing by leases on top of a fabric."""
