-- Adds a line to a job's log. KEYS: as in job.lua. ARGV: line, lines to keep.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
note(ARGV[1], ARGV[2])
change(KEYS[1])
return 1
