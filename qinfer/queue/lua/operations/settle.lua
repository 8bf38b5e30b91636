-- Ends a request as requests/settle.lua, whose function `one` this one replaces, and counts it.
-- KEYS: those of settle.lua, operation.
local settle = one
local function one(KEYS, ARGV)
  local answer = settle(KEYS, ARGV)
  if answer[1] == 'first' then count_changed(KEYS[#KEYS], 1) end
  return answer
end
