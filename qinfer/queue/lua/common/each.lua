-- Runs another script's function `one` for several requests of a partition.
-- KEYS: those of each. ARGV: requests, keys per request, then for each the number of arguments and these. Returns the
--   replies.
local requests, width = tonumber(ARGV[1]), tonumber(ARGV[2])
local answers, at = {}, 3
assert(width > 0 and requests * width == #KEYS, 'the KEYS do not match the number of requests')
for number = 1, requests do
  local keys, arguments, count = {}, {}, tonumber(ARGV[at])
  assert(at + count <= #ARGV, 'a request has fewer ARGV than it declares')
  for i = 1, width do keys[i] = KEYS[(number - 1) * width + i] end
  for i = 1, count do arguments[i] = ARGV[at + i] end
  at = at + count + 1
  answers[number] = one(keys, arguments)
end
return answers
