-- Writes a trial and its endpoint, if both are as expected; returns the endpoint's revision, or 0.
-- KEYS: endpoints, trials, events, webhooks' queue. ARGV: name, expected revision, expected trial ('' = none), trial,
--   endpoint without revision ('' = unchanged), event ('' = none), events to keep, ms to keep them, webhook ('' = none),
--   ms to try it.
local name, seen, document, event = ARGV[1], ARGV[2], ARGV[5], ARGV[6]
local current = redis.call('HGET', KEYS[1], name)
local revision = current and string.match(current, '^{"revision":(%d+),') or ''
if revision ~= seen or (redis.call('HGET', KEYS[2], name) or '') ~= ARGV[3] then return 0 end
if document ~= '' then
  revision = redis.call('HINCRBY', KEYS[1], '', 1)
  redis.call('HSET', KEYS[1], name, '{"revision":' .. revision .. ',' .. string.sub(document, 2))
end
redis.call('HSET', KEYS[2], name, revision .. ':' .. ARGV[4])
if event ~= '' then
  redis.call('LPUSH', KEYS[3], event)
  redis.call('LTRIM', KEYS[3], 0, ARGV[7] - 1)
  redis.call('PEXPIRE', KEYS[3], ARGV[8])
end
if ARGV[9] ~= '' then deliver(KEYS[4], 'endpoint:' .. name, ARGV[9], tonumber(ARGV[10])) end
return tonumber(revision)
