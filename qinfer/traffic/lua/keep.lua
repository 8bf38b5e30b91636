-- Keeps the target of a request under its idempotency key and its id: what was kept before counts, under the key first.
-- KEYS: one for each of them, the key's first. ARGV: target, ms to live, target that counts as none ('' = each counts).
-- Returns the target.
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
