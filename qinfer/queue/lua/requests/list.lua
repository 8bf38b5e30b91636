-- Lists requests of a model in the order of indexes: `due`, the next deadline first; `ended:<state>`, the last end first.
-- KEYS: indexes. ARGV: prefix, group, count, score and id behind which the first index continues (no score = at its
--   start, no id = at the score), fields to read.
-- Returns {index's number, score, id, request (see read.lua)} of each.
local prefix, group, left, score, id = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local fields, found = {unpack(ARGV, 6)}, {}

for number, index in ipairs(KEYS) do
  local is_due = index == prefix .. 'due'
  local start = 0
  if number == 1 and score ~= '' then
    if id ~= '' and redis.call('ZSCORE', index, id) == score then
      start = redis.call(is_due and 'ZRANK' or 'ZREVRANK', index, id) + 1
    elseif is_due then
      start = redis.call('ZCOUNT', index, '-inf', '(' .. score)
    else
      start = redis.call('ZCOUNT', index, '(' .. score, '+inf')
    end
  end
  local entries = left > 0
    and redis.call(is_due and 'ZRANGE' or 'ZREVRANGE', index, start, start + left - 1, 'WITHSCORES') or {}
  for i = 1, #entries, 2 do
    found[#found + 1] = {number, entries[i + 1], entries[i], read_request(prefix, group, entries[i], fields)}
  end
  left = left - #entries / 2
end
return found
