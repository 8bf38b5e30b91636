-- Trims dead letters, after one of `size` bytes was added, by age, then by bytes.
local function trim_letters(letters, letter, size, age, most)
  redis.call('PEXPIRE', letters, age)
  redis.call('XTRIM', letters, 'MINID', string.format('%.0f', tonumber(string.match(letter, '^%d+')) - age))
  local count = redis.call('XLEN', letters)
  repeat
    local excess = redis.call('MEMORY', 'USAGE', letters, 'SAMPLES', 0) - most
    if excess > 0 and count > 1 then
      -- By average size: reading each of many would take seconds.
      local average = (excess + most - size) / (count - 1)
      count = math.max(1, count - math.max(1, math.floor(excess / average)))
      redis.call('XTRIM', letters, 'MAXLEN', count)
    end
  until not (excess > 0) or count <= 1 -- `not`: comparisons with NaN are false
end
