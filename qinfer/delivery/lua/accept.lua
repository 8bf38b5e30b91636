-- Accepts an asynchronous request: stores its record, its payload and its deadline, and appends it to its lane.
-- KEYS: lane, its lane for the delayed, record, due, payload, payload as it was staged, idempotency key.
-- ARGV: group, consumer of what was released, of suspects, id, frame, payload's place (none | given | staged), payload,
--   limit (0 = none, -1 = nothing new), ms: timeout, result's time to live, tombstone's, margin, idempotency key's (0 = there is no key),
--   body hash, the record's further fields and values.
-- Returns {what, id, body hash, names of objects that nothing refers to now}: what is new | known | full | gone (the staged
--   payload).
return one(KEYS, ARGV)
