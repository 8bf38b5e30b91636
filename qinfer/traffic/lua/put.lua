-- Writes or removes an endpoint, if its revision is the expected one. Revisions count the changes of all endpoints, so
-- that the latest shows a reader whether it has seen them all.
-- KEYS: endpoints, trials. ARGV: name, expected revision ('' = any, 0 = none), document without revision ('' = remove),
--   least revision. Returns {1, new revision}, or {0, present revision, 0 = none}.
local name, seen, document = ARGV[1], ARGV[2], ARGV[3]
local current = redis.call('HGET', KEYS[1], name)
local is = current and string.match(current, '^{"revision":(%d+),') or '0'
if (seen ~= '' and seen ~= is) or (document == '' and not current) then return {0, tonumber(is)} end
local least = tonumber(ARGV[4])
if tonumber(redis.call('HGET', KEYS[1], '') or '0') < least then redis.call('HSET', KEYS[1], '', ARGV[4]) end
local revision = redis.call('HINCRBY', KEYS[1], '', 1)
if document == '' then
  redis.call('HDEL', KEYS[1], name)
  redis.call('HDEL', KEYS[2], name)
else
  redis.call('HSET', KEYS[1], name, '{"revision":' .. revision .. ',' .. string.sub(document, 2))
end
return {1, revision}
