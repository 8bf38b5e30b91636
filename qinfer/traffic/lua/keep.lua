-- Keeps a request's target, unless one is kept; returns the kept one, the idempotency key's first.
-- KEYS: of the idempotency key, of the id. ARGV: target, ms to live, target that counts as none ('' = no target).
local target, gone = ARGV[1], ARGV[3]
local kept = {}
for i, key in ipairs(KEYS) do
  kept[i] = redis.call('GET', key)
  if kept[i] == gone then kept[i] = false end
end
for i = #KEYS, 1, -1 do target = kept[i] or target end
for i, key in ipairs(KEYS) do
  if not kept[i] then redis.call('SET', key, target, 'PX', ARGV[2]) end
end
return target
