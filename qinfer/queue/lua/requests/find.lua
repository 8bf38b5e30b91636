-- Finds the request that was accepted before with the same id or idempotency key, and tells its end again; see known.lua.
-- KEYS: record, idempotency key (left out: there is none). ARGV: id, body hash, notes (left out: those that it has).
-- Returns {id, body hash}, or nil where there is none.
local id, hash = known(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3])
return id and {id, hash}
