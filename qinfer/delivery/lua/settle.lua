-- Ends an asynchronous request, unless it has ended, and removes its entry in any case.
-- KEYS: record, result, result as it was staged, due, outbox of the webhooks, payload.
-- ARGV: what the partition's keys begin with, group, id, the entry's lane and id ('' = those of the record), result's place
--   (none | given | staged), result, attempt (0 = it was not executed), the record's state and further fields and values.
-- Returns {what, who waits, by line, names of objects that nothing refers to now}: what is first | late | gone (the staged
--   result: nothing was done).
return one(KEYS, ARGV)
