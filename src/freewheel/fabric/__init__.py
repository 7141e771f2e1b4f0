"""Moving vectors between workers: the contract, and what is built once on top of it."""
