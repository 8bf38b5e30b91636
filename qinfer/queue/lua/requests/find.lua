-- Finds an accepted request, and publishes its end again; see known.lua.
-- KEYS: record, idempotency key (optional). ARGV: id, body hash, notes (optional: the old ones). Returns {id, body
--   hash}, or nil.
local id, hash = known(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3])
return id and {id, hash}
